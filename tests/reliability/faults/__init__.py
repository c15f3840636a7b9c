"""Real faults and what judges them: processes killed, disks cut off, bits flipped."""
