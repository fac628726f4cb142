"""Captures steps of a few sizes as CUDA graphs, and replays the graphs."""
