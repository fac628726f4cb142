"""Shows a job, or the calls to an ``LLM``, as one HTML page without scripts or network requests.

``from_output`` and ``from_calls`` collect the numbers in a ``ReportData``; ``timeline`` and
``histograms`` reduce steps and rows to a few hundred points. ``captions`` describes the points in
words, and ``charts`` and ``svg`` draw them. ``page`` makes the HTML, and ``write`` writes the file.
"""
