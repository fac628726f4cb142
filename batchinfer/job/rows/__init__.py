"""A row to a request, a completion to a row of the output, and the order rows run in."""
