"""OpenAI batch files: reads requests, and writes responses and errors."""
