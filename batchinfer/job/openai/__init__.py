"""OpenAI's batch files: requests in, responses and errors out."""
