"""`dataflex report`: a page of what a run has done, from the files in its folder."""
