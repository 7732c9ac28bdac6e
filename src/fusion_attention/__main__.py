"""`python -m fusion_attention` runs the command `fusion-attention`."""

from fusion_attention.cli import main

main()
