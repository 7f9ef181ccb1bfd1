"""The bug clinic: sick runs of GRPO, to be recognized by their charts."""

from minigrpo.clinic.charts import VITAL_SIGNS, Chart, off_one, signs
from minigrpo.clinic.diagnosis import Case, diagnose, judge, numbered, patient, table
from minigrpo.clinic.patients import (
    PATIENTS,
    SHORT,
    WARDS,
    Patient,
    caught,
    complaint,
    record,
    run,
)

__all__ = [
    "PATIENTS",
    "SHORT",
    "VITAL_SIGNS",
    "WARDS",
    "Case",
    "Chart",
    "Patient",
    "caught",
    "complaint",
    "diagnose",
    "judge",
    "numbered",
    "off_one",
    "patient",
    "record",
    "run",
    "signs",
    "table",
]
