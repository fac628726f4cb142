"""A row to a request, a completion to a row of the output, and the order rows run in.

``reader`` makes rows into prompts, ``window`` puts them in order, ``task`` and
its modules (``generate``, ``score``, ``embed``; ``tasks`` lists them) make requests and take
completions back, ``finished_row`` makes their output rows.

May import: config, errors, console, engine, text, pooling, requests, job.
"""
