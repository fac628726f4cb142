"""Tools that a model may call, and the formats of its calls.

``row_tools`` reads the tools of a row, and ``formats`` finds the format of a model.
``json_formats``, ``tag_formats`` and ``text_formats`` define formats, and ``call_grammar`` makes
their grammars.
"""
