"""The page of a run: `report.html`, rewritten after every round from the run's own files.

`record` reads a run directory, `comparison` and `samples` set the aligned model beside the base
model, `plane` and `figures` draw in the one style of `drawing`, `page` writes one self-contained
file that asks nothing of the network.
`python -m firm.report RUN_DIR` rewrites the page of any run. What cannot be drawn,
because the files of a run hold what they should not, is a note on its page and a warning; a run
never ends for it.

Several runs have pages, too: `settings_page` compares settings over seeds, `front_page` shows the
fronts of a sweep over preferences, both by the figures of `settings` and `cloud_plane` and the
bytes of `ledger`. `paper` draws the same as PNG and SVG with the data beside them.
"""

from firm.report.page import alarms, update_report, write_report
from firm.report.record import Record, read_record

__all__ = ["Record", "alarms", "read_record", "update_report", "write_report"]
