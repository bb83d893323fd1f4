"""Which of a target's layers should an EAGLE-3 draft head read, and how would you know?

The modules follow the chapters of the book. README's table lists them; each imports only from its
own row or rows above it.
"""
