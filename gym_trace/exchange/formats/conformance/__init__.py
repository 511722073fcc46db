"""Tests that every exporter and importer must pass (gym_trace.exchange.formats.contract).

    from my_package import TablesExporter, read_tables  # the loader that people use
    from gym_trace.exchange.formats.conformance import Loaded, check_exporter

    def load(path):
        for table in read_tables(path):
            yield Loaded(table.obs, table.act, table.rew, table.terminated, table.truncated, seed=table.seed)

    def test_tables(tmp_path):
        rejected = check_exporter(TablesExporter(), load, tmp_path)
        assert not rejected

check_exporter() exports small traces of every kind, reads them with load, and compares the result with the trace. They
must be equal, bit for bit, except for the losses that the exporter reports.
"""

from gym_trace.exchange.formats.conformance.checks import check_export, check_exporter, check_importer, check_round_trip
from gym_trace.exchange.formats.conformance.comparing import Loaded, difference, loaded_from
from gym_trace.exchange.formats.conformance.zoo import make_zoo

__all__ = [
    "Loaded",
    "check_export",
    "check_exporter",
    "check_importer",
    "check_round_trip",
    "difference",
    "loaded_from",
    "make_zoo",
]
