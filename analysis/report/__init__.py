"""The report of a fit: the verdict in words, the page, the figures' files and ``frontier.json``."""

from analysis.report.frontier_json import SCHEMA, frontier_json
from analysis.report.words import verdict
from analysis.report.writing import Report, write_report

__all__ = ["SCHEMA", "Report", "frontier_json", "verdict", "write_report"]
