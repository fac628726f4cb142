"""Images of a job's rows: finds them by the types of columns, numbers them, loads their pixels."""
