//! Load reports under tonic, over real connections: in the trailers of calls, in rejections, and as
//! a stream that ends with the service.

use http::uri::PathAndQuery;
use lowtide::Memory;
use lowtide::service::LOAD_REPORT_STREAM_PATH;
use tonic::metadata::MetadataMap;
use tonic::service::Routes;

use super::*;

const METADATA: &str = "endpoint-load-metrics-bin";

/// Returns the message of the one report.
fn report(metadata: &MetadataMap) -> Bytes {
    let reports: Vec<_> = metadata.get_all_bin(METADATA).iter().collect();
    assert_eq!(reports.len(), 1, "{metadata:?}");
    reports[0].to_bytes().expect("Base64")
}

/// Returns field 9 of the message, `application_utilization`: the last one, a double. Zero is left
/// out.
fn utilization(message: &Bytes) -> f64 {
    let (head, value) = message.split_at(message.len() - 8);
    if head.last() != Some(&0x49) {
        return 0.0;
    }
    f64::from_le_bytes(value.try_into().expect("8 bytes"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_client_gets_a_report_with_each_answer() {
    let admission = admission();
    let layer = layer(&admission).with_load_reports();
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let server = Server::builder().layer(layer).add_service(Echo);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let mut client = connect(address).await;

    client.ready().await.expect("the connection stands");
    let path = PathAndQuery::from_static("/test.Echo/Echo");
    let call = client.unary(Request::new(Bytes::from_static(b"ebb")), path, Raw);
    let answer = tokio::time::timeout(PATIENCE, call).await.expect("it hangs").expect("served");
    assert!(utilization(&report(answer.metadata())) < 1.0, "in the trailers");

    let held = admission.try_admit(Cost::host(ByteSize::mib(45))).expect("fits");
    let status = echo(&mut client, "ebb").await.expect_err("full");
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(utilization(&report(status.metadata())) >= 1.0, "the head is all, and has it");
    drop(held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_client_reads_a_stream_of_reports_until_the_service_ends() {
    let memory = Memory::builder().detached();
    let memory = memory.memory_limit(ByteSize::gib(1)).start().expect("starts");
    let layer = MemoryLayer::new(memory.admission().clone(), Cost::host(COST)).with_load_reports();
    let streams = layer.load_report_service();
    let routes = axum::Router::new().route_service(LOAD_REPORT_STREAM_PATH, streams);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (end, ends) = tokio::sync::oneshot::channel::<()>();
    let server = Server::builder().layer(layer).add_routes(Routes::from(routes));
    let end_of = async { drop(ends.await) };
    let incoming = TcpIncoming::from(listener);
    let serving = tokio::spawn(server.serve_with_incoming_shutdown(incoming, end_of));
    let mut client = connect(address).await;

    client.ready().await.expect("the connection stands");
    // Every 100 ms, in nanoseconds.
    let asked = Bytes::from_static(&[0x0a, 5, 0x10, 0x80, 0xc2, 0xd7, 0x2f]);
    let path = PathAndQuery::from_static(LOAD_REPORT_STREAM_PATH);
    let call = client.server_streaming(Request::new(asked), path, Raw);
    let stream = tokio::time::timeout(PATIENCE, call).await.expect("it hangs").expect("a stream");
    let mut stream = stream.into_inner();
    for _ in 0..3 {
        let next = tokio::time::timeout(PATIENCE, stream.message()).await.expect("it hangs");
        assert!(next.expect("no error").is_some(), "a report");
    }

    // The server waits for its streams, as it does for calls.
    end.send(()).expect("it serves");
    memory.set_ending();
    let last = async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended without a status"),
                Err(status) => return status,
            }
        }
    };
    let status = tokio::time::timeout(PATIENCE, last).await.expect("it hangs");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(status.message().contains("shutting down"), "{status:?}");
    drop((client, stream));
    let served = tokio::time::timeout(PATIENCE, serving).await.expect("it hangs");
    served.expect("no panic").expect("no error");
    let report = memory.shutdown(PATIENCE).await;
    assert!(report.is_clean(), "{report}");
}
