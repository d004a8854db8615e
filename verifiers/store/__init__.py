"""The run directory: appends, reads, resumes and exports the rollouts of a run."""

from verifiers.store.appender import Appender, ResultsGoneError
from verifiers.store.export import export_parquet, to_hf_dataset, write_jsonl
from verifiers.store.lock import RunInUseError
from verifiers.store.mending import Compacted
from verifiers.store.reading import Rows, read_records
from verifiers.store.record import CORE_COLUMNS, Key, Record, encode, example_key, is_failed, to_record
from verifiers.store.run_dir import DEFAULT_ROOT, RunDir, find_run, is_run_dir, list_runs, safe_name
from verifiers.store.saved import SavedRollouts
from verifiers.store.training_data import to_dpo, to_sft

__all__ = [
    "Appender",
    "Compacted",
    "CORE_COLUMNS",
    "DEFAULT_ROOT",
    "Key",
    "Record",
    "ResultsGoneError",
    "Rows",
    "RunDir",
    "RunInUseError",
    "SavedRollouts",
    "encode",
    "example_key",
    "export_parquet",
    "find_run",
    "is_failed",
    "is_run_dir",
    "list_runs",
    "read_records",
    "safe_name",
    "to_dpo",
    "to_hf_dataset",
    "to_record",
    "to_sft",
    "write_jsonl",
]
