"""Which of a target's layers should an EAGLE-3 draft head read, and how would you know?

The modules follow the chapters of the book, and import only upwards in this list:
``spec``, ``runs``, ``targets``, ``corpus``, ``states``, ``entropy``, ``filtering``, ``cka``,
``selection``, ``head``, ``training``, ``engine``, ``decoding``, ``speed``; ``figures``,
``chapters``, ``booksite`` and ``cli`` sit on top.
"""
