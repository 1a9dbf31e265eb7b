"""Composites: photographic cut-outs pasted on photographs.

catalogue  which files of which Debian packages        library    pixels as memory-mapped arrays
deb        unpack packages without root                scene      compose one image
fetch      download, check, build the library          questions  what, where, how many, which colour
colour     name of a cut-out's main colour             dataset    the data set
"""
