"""Few query rows against many keys."""
