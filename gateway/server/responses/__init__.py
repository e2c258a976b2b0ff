"""OpenAI's Responses API: another way to ask for a chat answer. Its body and its events differ, the way there does not."""
