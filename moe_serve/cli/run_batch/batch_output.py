"""The output file of rows: each row is appended whole, and a later run finds the rows of an earlier
one."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from moe_serve.cli.run_batch.batch_lines import ROW_START, BatchRow, row_id
from moe_serve.errors import ConfigError


class BatchOutput:
    """The output file, open for one process while a batch runs. Close it, or use `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ids: set[str] = set()  # of rows without a custom_id
        self._custom_ids: set[str] = set()
        self.num_before = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write the rows to {path}: {error.strerror}.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(f"another run is writing to {path}.") from None
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_regular:
            os.fsync(self._file)
        os.close(self._file)

    def has(self, number: int, custom_id: str | None) -> bool:
        """Whether an earlier run wrote the row of this line."""
        if custom_id is None:
            return row_id(number) in self._ids
        return custom_id in self._custom_ids

    def append(self, row: BatchRow) -> None:
        """Appends a row in one write, so that a reader, or a killed process, leaves the row whole
        or absent."""
        self._write(row.to_json())

    def _write(self, content: bytes) -> None:
        try:
            written = os.write(self._file, content)
        except OSError as error:
            raise ConfigError(
                f"{self.path} does not take a row: {error.strerror}. What is written stays: make "
                "room, and run the same command again."
            ) from error
        if written < len(content):
            os.truncate(self._file, os.fstat(self._file).st_size - written)
            raise ConfigError(f"the disk took {written} of {len(content)} bytes of a row: full?")

    @property
    def _is_regular(self) -> bool:
        return self.path.is_file()

    def _read(self) -> None:
        """Reads the rows of earlier runs; half a row at the end, of a run that was killed, is cut
        off."""
        if not self._is_regular:
            return
        complete = 0
        with self.path.open("rb") as rows:
            for number, line in enumerate(rows, start=1):
                if not line.endswith(b"\n"):
                    self._end(number, line, complete)
                    return
                complete += len(line)
                if line.strip():
                    self._take(number, line)

    def _end(self, number: int, line: bytes, start: int) -> None:
        """Keeps a last line that lacks only its newline, and cuts off half a row."""
        if line[: len(ROW_START)] != ROW_START[: len(line)]:
            raise self._no_row(number)  # a file of another program, not half a row of ours
        try:
            json.loads(line)
        except ValueError:
            os.truncate(self._file, start)
            return
        self._take(number, line)
        self._write(b"\n")

    def _take(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            custom_id, own_id = row["custom_id"], row["id"]
        except (ValueError, TypeError, KeyError):
            raise self._no_row(number) from None
        self.num_before += 1
        if isinstance(custom_id, str):
            self._custom_ids.add(custom_id)
        else:
            self._ids.add(str(own_id))

    def _no_row(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self.path}:{number} is not a row of a batch: name another output file."
        )
