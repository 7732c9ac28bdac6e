"""What lies between interfaces and kernels: a problem, its lengths, its operands. No word of CANN below here."""
