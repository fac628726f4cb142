"""Runs jobs: reads their datasets, feeds the engine, and writes output files and statistics.

``spec`` parses the job file and ``input`` reads the dataset. ``rows`` turns rows into requests, and
completions into output rows. ``run`` runs the requests, ``output`` writes parts, and ``stats``
collects statistics. ``plan`` and ``init`` implement the commands of those names, ``openai`` handles
OpenAI batch files, and ``storage`` accesses local files and object stores.
"""
