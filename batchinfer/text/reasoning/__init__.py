"""Separates the reasoning of models from their answers, on the token stream.

``formats`` finds how a model marks its reasoning; ``harmony`` is the format of gpt-oss;
``grammar`` bounds the reasoning and delays grammars until the answer begins.
"""
