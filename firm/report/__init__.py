"""Reports: reads run directories into one tidy table, draws figures, and renders pages.

`record` reads a run directory, and `tables` puts the numbers of one run, or of several settings
over seeds, into one tidy table. `firm.base.quantities` registers their titles and units. `drawing`
and `plane` draw figures in one style as plain data for plotly, and `static` draws the same figures
as PNG and SVG and writes their data as CSV. `page` is the model of every page, with its template: a
page is a list of blocks, each a section with figures, a table, or samples. Their titles and texts
are in `sections.yaml`; `run_figures`, `settings_sections`, `front_sections` and `ledger` draw them
for every page that has them. There are five pages: `run_page` (one run), `settings_page` (settings
over seeds, of language models or classic algorithms), `front_page` (a sweep over preferences),
`comparison` (evaluated adapters) and `reward_page` (reward models on held-out pairs). `terminal`
prints the results of a study.

A page is one self-contained file that needs no network; pages of a sweep or study share the
plotly.min.js in its folder. A section that cannot be drawn, because the files of a run contain
invalid values, becomes a note on the page and a warning; it never ends a run.
`firm report FOLDER` embeds plotly into the page of a run, sweep or study.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.report.page import alarms
    from firm.report.record import Record, read_record
    from firm.report.run_page import update_report, write_report

__all__ = ["Record", "alarms", "read_record", "update_report", "write_report"]

__getattr__, __dir__ = lazy(__name__)
