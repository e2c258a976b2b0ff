"""`gateway status`.

`feed` reads status documents of any version, `board` remembers them and the last minute (`history`). What the viewer has chosen
is a value, and a key makes another one of it (`state`, `keys`). `view` draws both, purely: `rank_rows` and `pages` are parts of
the frame, `lines` and `words` what it is made of. `live` has the clock and the signals, `terminal` the terminal.
"""
