"""The figures and the table of the FIRM paper, replayed in the miniature world."""
