"""The front end: an OpenAI-compatible server, `AsyncLLM`, and the core clients that reach the engine cores over ZMQ."""
