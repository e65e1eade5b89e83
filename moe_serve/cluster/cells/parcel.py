"""The names of parcels, for the cells."""

from moe_serve.cluster.parcels.parcel import Lease, PageCarrier, Parcel, ParcelEnd, RankPlace

__all__ = ["Lease", "PageCarrier", "Parcel", "ParcelEnd", "RankPlace"]
