"""Runs → one tidy table → figures → pages.

`record` reads a run directory and `tables` makes one tidy table of its numbers, of one run or of
several settings over seeds. `firm.quantities` names them. `drawing`, `plane`, `run_figures`,
`classic_figures` and `scaling` draw them in one style as plain data for plotly; `static` draws the
same figures as PNG and SVG with the data beside them. `page` is the one model of a page with its
template. On it stand `run_page` (one run), `settings_page` (settings over seeds), `front_page` (a
sweep over preferences), `classic_page` (vision and tables) and `comparison` (evaluated adapters).

A page is one self-contained file that asks nothing of the network; those of a sweep or study and
its points share the plotly.min.js in its folder. What cannot be drawn, because
the files of a run hold what they should not, is a note on its page and a warning; a run never ends
for it. `python -m firm.report FOLDER` makes the page of any run, sweep or study one file.
"""

from firm.report.page import alarms
from firm.report.record import Record, read_record
from firm.report.run_page import update_report, write_report

__all__ = ["Record", "alarms", "read_record", "update_report", "write_report"]
