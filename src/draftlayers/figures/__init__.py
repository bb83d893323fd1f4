"""Figures of the book: ``style``, one module of drawings for each chapter, ``drawing`` for files.

A function of a chapter's module takes plain arrays and returns a matplotlib ``Figure``; it
computes no statistic, reads no file and shows nothing. How a figure looks is no part of a number,
so a change here executes no chapter: ``drawing`` keeps each call and draws it again.
"""
