"""Values, tables and progress as they are shown on a terminal."""
