"""Definitions of auxiliary operators of models (norms, rotary embedding, caches, experts, ...), which torch computes.

These definitions have no lowering to the intermediate representation, but are checked, documented and sampled as all
others. The definitions are loaded on first use.
"""
