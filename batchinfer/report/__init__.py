"""A job, or the calls of an ``LLM``, as one HTML page: no scripts, no requests.

``from_output`` and ``from_calls`` collect the numbers in a ``ReportData``; ``timeline`` and
``histograms`` reduce steps and rows to a few hundred points. ``captions`` puts them into words,
``charts`` and ``svg`` into pictures. ``page`` makes the HTML, ``write`` the file.

May import: errors, console, engine, job.
"""
