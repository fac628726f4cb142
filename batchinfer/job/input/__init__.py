"""The dataset: its files, formats, columns and selected rows."""
