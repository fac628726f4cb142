"""Job plane: rows, files, plans and statistics.

``spec`` parses the job file and ``input`` reads the dataset. ``rows`` turns rows into requests, and
completions into output rows. ``run`` runs the requests, ``output`` writes parts, and ``stats``
counts. ``plan`` and ``init`` are commands, ``openai`` handles OpenAI batch files, and ``storage``
accesses local files and object stores.
"""
