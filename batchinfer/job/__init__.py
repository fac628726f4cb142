"""Job plane: rows, files, plans and statistics, in rooms along the way of a row.

``spec`` is the job file, ``input`` the dataset; ``rows`` makes requests of rows and output of
completions, ``run`` runs them, ``output`` writes parts, ``stats`` counts. ``plan``, ``init`` and
``openai`` are commands and formats of their own; ``storage`` has files, here and in stores.
"""
