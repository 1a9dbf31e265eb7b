"""Visual question answering (Sec. 4.4): a language model reads the tokens of an adaptive vision tower."""
