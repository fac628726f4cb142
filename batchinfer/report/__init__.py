"""A job, or the calls of an ``LLM``, as one HTML page to look at: no scripts, no requests.

A row of numbers goes one way: ``from_output`` or ``from_calls`` read it, ``timeline`` and
``lengths`` bring it down to a few hundred points, ``findings`` holds them, ``words`` and ``charts``
say and draw them, ``page`` puts both into HTML.
"""
