"""What the measuring scripts share: timing, costs, the machine, and the reports. Not part of the wheel."""
