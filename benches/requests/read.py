"""Reads load reports as a gRPC client does: `read.py FREE FULL`, the addresses of two servers.

A stream of reports, and its invalid requests; and calls that gRPC's own balancer sends to both
servers by their reports, those in trailers and those of streams. Ends with 1 if something is not as
expected.
"""

import json
import sys
import time

import grpc
from google.protobuf.duration_pb2 import Duration
from xds.data.orca.v3.orca_load_report_pb2 import OrcaLoadReport
from xds.service.orca.v3.orca_pb2 import OrcaLoadReportRequest

TIMEOUT = 20
# Calls that are counted together, and the most of them that the full server may get. Without
# reports each gets a half.
CALLS = 500
PART_MAX = 0.25


def check(holds, what):
    if not holds:
        sys.exit(f"not as expected: {what}")


def stream(channel, **interval):
    method = channel.unary_stream(
        "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
        request_serializer=OrcaLoadReportRequest.SerializeToString,
        response_deserializer=OrcaLoadReport.FromString,
    )
    return method(OrcaLoadReportRequest(report_interval=Duration(**interval)), timeout=TIMEOUT)


def read_stream(address, expected):
    with grpc.insecure_channel(address) as channel:
        name = channel.unary_unary("/test.Server/Name")
        for _ in range(100):
            name(b"", timeout=TIMEOUT)
        # An average over some seconds, which begins with nothing.
        calls = stream(channel, nanos=100_000_000)
        for report in calls:
            if abs(report.application_utilization - expected) < 0.05:
                break
        calls.cancel()
        print(f"a report:\n{report}")
        check(report.rps_fractional > 0, "rps_fractional")
        utilization = report.named_metrics["host_utilization"]
        check(utilization == report.application_utilization, "application_utilization")
        # The full server does not look at this process.
        check((0 < report.mem_utilization <= 1) == (expected < 0.5), "mem_utilization")
        for interval, wrong in (({"seconds": -5}, "-5 s"), ({"nanos": -1}, "-1 ns")):
            try:
                next(stream(channel, **interval))
                check(False, f"{interval} is accepted")
            except grpc.RpcError as error:
                check(error.code() == grpc.StatusCode.INVALID_ARGUMENT, error)
                check(wrong in error.details(), error)


def balance(addresses, policy, **settings):
    """Calls both servers until the full one gets few calls, and returns its part."""
    config = {"loadBalancingConfig": [{policy: settings}]}
    # The list of addresses is no authority.
    authority = ("grpc.default_authority", "localhost")
    options = [authority, ("grpc.service_config", json.dumps(config))]
    with grpc.insecure_channel("ipv4:" + ",".join(addresses), options=options) as channel:
        name = channel.unary_unary("/test.Server/Name")
        end = time.monotonic() + TIMEOUT
        while True:
            answers = [name(b"", timeout=TIMEOUT) for _ in range(CALLS)]
            part = answers.count(b"full") / CALLS
            if part <= PART_MAX or time.monotonic() > end or policy == "round_robin":
                return part


def main(free, full):
    read_stream(free, 0.1)
    read_stream(full, 0.9)
    addresses = [free, full]
    check(0.4 < balance(addresses, "round_robin") < 0.6, "a half without reports")
    weights = {"blackoutPeriod": "0s", "weightUpdatePeriod": "0.1s"}
    part = balance(addresses, "weighted_round_robin", **weights)
    print(f"calls to the full server, by trailers: {part:.0%}")
    check(part <= PART_MAX, "the reports in trailers are read")
    weights |= {"enableOobLoadReport": True, "oobReportingPeriod": "0.1s"}
    part = balance(addresses, "weighted_round_robin", **weights)
    print(f"calls to the full server, by streams: {part:.0%}")
    check(part <= PART_MAX, "the reports of streams are read")


if __name__ == "__main__":
    main(*sys.argv[1:])
