"""Job plane: rows, files, plans and statistics."""
