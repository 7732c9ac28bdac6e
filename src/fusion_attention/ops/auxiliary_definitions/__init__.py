"""Operator definitions of models' other functions (norms, rotary embedding, caches, experts, ...), computed by torch.

These definitions have no lowering to the intermediate representation; checks, documentation and sample calls are made
from them as from all other definitions. They are loaded on first use.
"""
