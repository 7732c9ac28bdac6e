"""Decoding: attention of few query rows to many keys, split over programs."""
