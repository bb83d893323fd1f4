"""The book: staging (`stage`), the Sphinx extension (`extension`) and the final scan (`scan`).

Used by ``draftlayers book``. Executing the notebooks is the work of ``draftlayers.chapters``;
this package only turns what they left in the run folder into a website.
"""
