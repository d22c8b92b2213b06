"""What happens in a run: recorded as events, shown while it runs, reported afterwards.

Each rank appends typed events to its own file, and every view is made from those files alone: the
live display, the sinks, the report. Nothing here imports torch, and nothing here can hold up or end
a step but a disk that takes no more events.
"""

from __future__ import annotations

from isthmus.observe.display import Display
from isthmus.observe.events import (
    Baselines,
    CheckpointLoaded,
    CheckpointRejected,
    CheckpointSaved,
    Event,
    Failure,
    FaultInjected,
    Notice,
    RankStarted,
    RunFinished,
    RunStarted,
    Step,
    Stopped,
    Validation,
)
from isthmus.observe.log import (
    EventLog,
    EventTail,
    Reading,
    events_path,
    follow,
    lab_events_path,
    read_events,
    read_run,
)
from isthmus.observe.page import render_page, report_json, write_report
from isthmus.observe.report import Prediction, Report, build_report
from isthmus.observe.sinks import Delivery, QueuedSink, Sink, TensorBoardSink
from isthmus.observe.table import render_table
from isthmus.observe.timeline import Timeline

__all__ = [
    "Baselines",
    "CheckpointLoaded",
    "CheckpointRejected",
    "CheckpointSaved",
    "Delivery",
    "Display",
    "Event",
    "EventLog",
    "EventTail",
    "Failure",
    "FaultInjected",
    "Notice",
    "Prediction",
    "QueuedSink",
    "RankStarted",
    "Reading",
    "Report",
    "RunFinished",
    "RunStarted",
    "Sink",
    "Step",
    "Stopped",
    "TensorBoardSink",
    "Timeline",
    "Validation",
    "build_report",
    "events_path",
    "follow",
    "lab_events_path",
    "read_events",
    "read_run",
    "render_page",
    "render_table",
    "report_json",
    "write_report",
]
