"""Separates the reasoning of models from their answers, in the stream of tokens.

``formats`` finds how a model marks its reasoning; ``harmony`` is the format of gpt-oss;
``grammar`` bounds the reasoning and delays grammars until the answer begins.
"""
