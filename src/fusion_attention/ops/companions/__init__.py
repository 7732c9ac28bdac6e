"""What stands around attention in a model: records of functions that torch itself computes in a few lines.

Such a record has no lowering: nothing of it reaches the waist. It is checked, documented and sampled as all others are.
"""
