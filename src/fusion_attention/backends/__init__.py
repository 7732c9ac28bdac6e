"""What computes: each module gives the same verbs on the waist's types and says itself what it cannot do.
They never import one another; the caller imports the one it chose."""
