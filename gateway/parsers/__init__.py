"""From the text that a model says to reasoning, content and tool calls, piece by piece. Pure: knows no HTTP and no tokens.

Rules
-----
* A marker may be cut anywhere between two pieces: text that may be the beginning of one is held back, and nothing else is.
* Whatever the pieces, what comes out is the same when it is joined.
* Text without markers comes out as it is. White space beside a marker belongs to the marker.
* What was to be a call and is none comes out as content, its markers included.

`choice.ChoiceParser` joins the two stages: `reasoning.ReasoningParser`, and behind it one of `tool_calls` or `tagged_calls`.
"""
