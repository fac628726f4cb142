"""Turns rows into requests and completions into output rows, and chooses the order of rows.

``reader`` makes prompts from rows, and ``window`` orders them. ``tasks`` lists the tasks, such as
``generate`` and ``score``; a task makes requests and gets their completions. ``finished_row`` makes
the output rows.
"""
