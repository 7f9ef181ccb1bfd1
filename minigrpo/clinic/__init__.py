"""The bug clinic: sick runs of GRPO without names, to be measured and diagnosed."""

from minigrpo.clinic.diagnosis import Case, diagnoses, patient, provenance, score, table
from minigrpo.clinic.measure import MEASUREMENTS
from minigrpo.clinic.patients import (
    PATIENTS,
    SHORT,
    Patient,
    caught,
    complaint,
    numbered,
    record,
    run,
    where_it_hurts,
)

__all__ = [
    "MEASUREMENTS",
    "PATIENTS",
    "SHORT",
    "Case",
    "Patient",
    "caught",
    "complaint",
    "diagnoses",
    "numbered",
    "patient",
    "provenance",
    "record",
    "run",
    "score",
    "table",
    "where_it_hurts",
]
