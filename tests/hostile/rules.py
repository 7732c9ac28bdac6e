"""Draws that lean on one decision each, by name: off means that no call is drawn which depends on it."""

# A score of -inf is a key that is not seen, whatever its value row holds (NaN, infinity).
HIDDEN_BY_INF = True
# A dropout mask and a seed in one call: the mask says what is kept; seed and offset are handed back.
MASK_AND_SEED = True
# One start index alone: the other one is 0.
ONE_START = True
# A bias or mask without elements may lie at any strides.
EMPTY_MATRICES = True
