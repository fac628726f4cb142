"""Formats other than Parquet and JSON Lines, and the base class of text formats."""
