"""Turns rows into requests and completions into output rows, and chooses the order of rows.

``read_prompts`` makes prompts from rows, and ``row_order`` orders the rows. ``tasks`` lists the
tasks, such as ``generate`` and ``score``; a task makes requests and gets their completions.
``finished_row`` makes the output rows.
"""
